"""What all packages of the router speak of: requests, events, failures and their rules, served models. No I/O."""
