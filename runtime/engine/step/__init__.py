"""One step: what it computes, how long it may take, the forward, and sampling."""
