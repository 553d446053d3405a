"""How processes start without secrets, and end with the process that started them."""
