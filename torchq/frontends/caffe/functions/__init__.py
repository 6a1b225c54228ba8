"""What graphs that come from Caffe call where torch has no function of the same meaning."""
