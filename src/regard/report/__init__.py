"""Tables and pictures: given numbers, it draws."""
