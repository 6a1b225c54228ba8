"""What the readers of all formats share."""
