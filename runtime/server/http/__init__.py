"""HTTP below the endpoints: sockets, bodies, events, keys and origins."""
