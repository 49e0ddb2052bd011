"""colabkit: fast input pipelines for training in hosted notebooks.

```python
import colabkit

staged = colabkit.stage("/content/drive/MyDrive/birds")
packed = colabkit.pack(staged.path, "birds.h5", size=128)
loader = colabkit.Loader(colabkit.open_pack(packed.path)["train"], batch_size=64, shuffle=True)
for images, labels in loader: ...
```

The code is in seven subpackages, in the order in which data flows: `foundation`, `storage`, `packs`, `loading`,
`training`, `monitoring`, `notebook`. Each imports only from those before it in this list. The docstring of a subpackage
describes its modules, and its `__init__.pyi` lists the names that other subpackages use.

Names are imported on first use: `import colabkit` imports nothing heavy and has no side effects.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
