"""The router service: owns every request from its first byte to its last one."""
