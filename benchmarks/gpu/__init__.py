"""What raypd does on a GPU: three scripts, each at most four minutes, each with one table.

    python -m benchmarks.gpu.exactness    # every family and method, in every precision
    python -m benchmarks.gpu.speed        # W1, W4 and W6 with the shapes of models that people run
    python -m benchmarks.gpu.profile      # a prefill and a decode pass: kernels, gaps, the host

They need torch, transformers, triton, numpy and pytest, and nothing else. Models have random
weights, which take the same time as real ones; no value can end early, because each has exactly
the tokens that the work gives it. A row that is finished is kept in a file, so that the same
command measures the rest. `--rehearse` runs a script with tiny models on any machine.
"""
