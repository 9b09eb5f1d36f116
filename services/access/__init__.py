"""Who may call what: roles, the table of RPCs, API keys, tenants and certificates."""
