"""What guessing brings, task by task, with many streams, with a draft model, and in llama.cpp."""
