"""POST /v1/responses, without storage: what agents of the official SDKs send."""
