"""The `epilora` command: `demo`, `doctor`, `bench` and `tune`."""
