"""What a server makes of uploads: rules, updates, privacy and compression."""
