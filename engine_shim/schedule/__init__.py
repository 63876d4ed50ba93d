"""Which request runs next, on which pages. No torch, no clock, no I/O: a loop around it does those."""
