"""What graphs that come from MXNet call where torch has no function of the same meaning."""
