"""The families of models that the engine computes, one file each; `registry` lists them."""
