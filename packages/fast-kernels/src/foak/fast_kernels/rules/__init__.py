"""One file for each kernel switch: how its modules are recognised, tried and replaced."""
