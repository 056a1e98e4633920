"""The `epilora` command: `demo`, `doctor` and `bench`."""
