"""Organizations built on sovereign-agent, to run and to learn from. The package itself never imports them."""
