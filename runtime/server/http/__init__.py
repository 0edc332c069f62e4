"""HTTP below the endpoints: sockets, bodies, events, and who may ask."""
