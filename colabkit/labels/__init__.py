"""Labels and splits of samples: from columns, from folders, by functions, or dealt out by seeded shares and folds."""

from colabkit.labels.folders import ClassTree, class_tree
from colabkit.labels.labelling import Labelling, Labels, Splits, label_samples
from colabkit.labels.splitting import SPLIT_FOLDERS, Kind, fold_numbers, shares_of, split_shares, strata_of

__all__ = [
    "SPLIT_FOLDERS",
    "ClassTree",
    "Kind",
    "Labelling",
    "Labels",
    "Splits",
    "class_tree",
    "fold_numbers",
    "label_samples",
    "shares_of",
    "split_shares",
    "strata_of",
]
