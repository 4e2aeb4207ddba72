"""One HTML page about runs that are over, or under way: what a run folder holds, drawn and put side by side."""
