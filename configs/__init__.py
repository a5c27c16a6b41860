"""Sites: where a run runs. Each file has a function `config(run_dir)` that returns a fresh `parsl.Config`."""
