"""What `mooncake-lite store` does. One file per command; nothing is imported before it is used."""
