"""How many messages may be delivered, whoever takes them."""
