"""colabkit: fast input pipelines for training in hosted notebooks.

```python
import colabkit, torch

pack = colabkit.prepare("/content/drive/MyDrive/birds", size=128, splits="train=0.8,val=0.2")
loader = colabkit.Loader(pack["train"], batch_size=64, shuffle=True)
model = colabkit.small_network(len(pack["train"].classes), (128, 128, 3))
step = colabkit.supervised_step(model, torch.optim.Adam(model.parameters()))
report = colabkit.train(step, loader, epochs=5, validate=colabkit.Loader(pack["val"], 64), to="run")
```

For a table of paths, name the columns with `path_column=` and `labels=`; paths are relative to the table's folder, or
to `root=`. For regression, use `small_network(1, shape)`, and pass `loss=torch.nn.MSELoss()` to `supervised_step`.
`Loader((images, labels), batch_size=64)` loads arrays; `data = open_pack("file.h5", x=, y=)["train"]` opens any HDF5
file, and `train, val = data.split((0.8, 0.2))` splits it. In your own loop, `transform=colabkit.augment.Normalize()`
converts images to floats.

The code is in seven subpackages, in the order in which data flows: `foundation`, `storage`, `packs`, `loading`,
`training`, `monitoring`, `notebook`. Each imports only from those before it in this list. The docstring of a subpackage
describes its modules, and its `__init__.pyi` lists the names that other subpackages use.

Names are imported on first use: `import colabkit` imports nothing heavy and has no side effects.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
