"""Types of all packages of the router: requests, events, failures and their rules. No I/O."""
