"""`mooncake-lite profile`: measures the real engine and writes a profile."""
