"""Moving cards between the host's nvidia driver and vfio-pci."""
