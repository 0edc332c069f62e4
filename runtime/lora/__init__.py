"""LoRA adapters: their files, and the adapters that an engine has loaded by name."""
