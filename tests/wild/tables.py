"""All pairs in the wild."""

from tests.wild import keras_pairs, mlx_more_pairs, mlx_pairs

MLX = {**mlx_pairs.TABLE, **mlx_more_pairs.TABLE}
KERAS = keras_pairs.TABLE
