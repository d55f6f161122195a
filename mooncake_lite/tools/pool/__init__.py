"""The KVCache pool for its users: the command `mooncake-lite store`."""
