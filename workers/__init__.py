"""Workers: turn a ticket into a durable record."""
