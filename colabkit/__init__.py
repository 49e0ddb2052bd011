"""colabkit: fast input pipelines for training in hosted notebooks.

```python
import colabkit

staged = colabkit.stage("/content/drive/MyDrive/birds")
packed = colabkit.pack(staged.path, "birds.h5", size=128)
loader = colabkit.Loader(colabkit.open_pack(packed.path)["train"], batch_size=64, shuffle=True)
for images, labels in loader: ...
```

The code is in seven rooms, in the order in which data flows; each imports only from rooms above it in this list:
`foundation`, `storage`, `packs`, `loading`, `training`, `monitoring`, `notebook`. The docstring of each room lists what
it holds, and its `__init__.pyi` the names that other rooms use.

Names load on first use: `import colabkit` imports nothing heavy and has no side effects.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
