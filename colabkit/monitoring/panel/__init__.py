"""The live panel. `api`: `dashboard()`; a `recorder` gathers the `content`, shown as `html` or `text` on `screens`."""
