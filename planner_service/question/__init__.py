"""What is to be planned: site, demand, targets. No I/O."""
