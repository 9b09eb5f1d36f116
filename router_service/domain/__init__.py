"""Types of all packages of the router: requests, events, failures and their rules, served models. No I/O."""
