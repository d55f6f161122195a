"""A store rank: lends DRAM to the pool, and keeps the HDF5 tier on SSD."""
