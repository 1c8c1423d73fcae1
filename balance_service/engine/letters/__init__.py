"""Dead letters after they were written: tried again, decided about, closed."""
