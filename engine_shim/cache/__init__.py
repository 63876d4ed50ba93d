"""The prefix cache of one rank: pages, a radix tree over them, its events and its book-keeping. No torch, no I/O."""
