"""The table of mistakes: the text that users type, and fragments that the message must or must not contain.

`mistake_page` makes the mistakes in the folder of `mistake_home`, with its variables, and writes the page.
"""

from __future__ import annotations

from dataclasses import dataclass

PYTHON, MAGIC, TERMINAL, LAUNCHER = "Python", "magic", "terminal", "launcher"


@dataclass(frozen=True)
class Mistake:
    """A mistake of a user.

    Attributes:
        what: the mistake, as a noun phrase.
        typed: what the user types; in the launcher, the fields to fill in and the button to click, separated by `; `.
        error: the class of the error; for argparse's errors in a terminal, `usage`.
        must: a fragment that the message contains.
        never: a fragment that it does not contain.
        scene: simulated condition: `full disk`, or the name of a package that is not installed.
        cause: class of the error that the traceback shows first, where it may come from the user's code;
            the simulated full disk counts as such code.
    """

    what: str
    typed: str
    error: str
    must: str
    never: str = "\0"
    scene: str = ""
    cause: str = ""

    @property
    def surface(self) -> str:
        """The place of the mistake: Python, a magic, a terminal or the launcher."""
        kinds = {"%": MAGIC, "colabkit ": TERMINAL, "Source:": LAUNCHER}
        return next((kind for start, kind in kinds.items() if self.typed.startswith(start)), PYTHON)


_ANOTHER_MODEL = """other = nn.Sequential(nn.Flatten(), nn.Linear(90, 3))
colabkit.train(step, loader, to="run")
other_step = colabkit.supervised_step(other, torch.optim.SGD(other.parameters(), lr=0.1))
colabkit.train(other_step, loader, epochs=2, to="run")"""
_GROWING = """class Growing(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.zeros(index + 1)
next(iter(colabkit.Loader(Growing(), 2, num_workers=0)))"""
_DELETED = """Path("mine.h5").write_bytes(Path("birds.h5").read_bytes())
mine = colabkit.open_pack("mine.h5")
Path("mine.h5").unlink()
mine["train"]"""

MISTAKES: dict[str, tuple[Mistake, ...]] = {
    "Paths": (
        Mistake("a typing error in a path", 'colabkit.stage("phots")', "SourceMissing", "no such file or folder"),
        Mistake("the same in a magic", "%stage phots", "SourceMissing", "run %mount if it is on Drive", "colabkit."),
        Mistake("the same in a terminal", "colabkit stage phots", "SourceMissing", "run colabkit mount", "%mount"),
        Mistake("the same in the launcher", "Source: phots; Pack", "SourceMissing", "run %mount if it is on Drive"),
        Mistake(
            "a variable that does not exist", "%pack {photos_path} x.h5", "InvalidOption", "no variable", "such file"
        ),
        Mistake("the same with a dollar sign", "%stage $photos_path", "InvalidOption", "no variable has this name"),
        Mistake(
            "the name of a variable in place of its value",
            "%pack pixels x.h5",
            "SourceMissing",
            "To pass the variable, write {pixels}.",
            "%mount",
        ),
        Mistake("an expression in braces", "%pack {pixels[0]} x.h5", "InvalidOption", "Assign the expression to"),
        Mistake("an empty path", "colabkit prepare photos --to ''", "InvalidOption", "or use --to none", "a str"),
        Mistake("a path that is None", "colabkit.stage(None)", "InvalidOption", "the source is None"),
        Mistake("a pack that is None", "colabkit.open_pack(None)", "InvalidOption", "None is not a valid path"),
        Mistake("a number for a path", 'colabkit.pack(3, "x.h5")', "InvalidOption", "the source is an int"),
        Mistake("None for a target", 'colabkit.pack("photos", None)', "InvalidOption", "None is not a valid path"),
        Mistake(
            "Drive that is not mounted", 'colabkit.stage("drive:birds")', "NotMounted", "Run colabkit.mount() first"
        ),
        Mistake("the same in a magic", "%stage drive:birds", "NotMounted", "Run %mount first"),
        Mistake("the same in a terminal", "colabkit stage drive:birds", "NotMounted", "Run colabkit mount first"),
        Mistake("a mount that does not exist", "%flush", "NotMounted", "Run %mount first"),
        Mistake("an address without a host", 'colabkit.stage("https://")', "InvalidOption", "host is missing"),
        Mistake(
            "a path where an address is expected", 'colabkit.fetch("photos")', "InvalidOption", "it is a local path"
        ),
        Mistake(
            "a Drive page instead of a link",
            'colabkit.fetch("https://drive.google.com/drive/my-drive")',
            "InvalidOption",
            "choose Share, then Copy link",
        ),
        Mistake(
            "an unfinished digest",
            'colabkit.fetch("https://example.com/a", digest="abc")',
            "InvalidOption",
            "sha256:HEX",
        ),
        Mistake("a folder to probe that does not exist", "colabkit probe phots", "SourceMissing", "does not exist"),
    ),
    "Tables": (
        Mistake(
            "a typing error in the path of a table",
            'colabkit.train_on("scores.cvs", path_column="where_is_it", root="photos")',
            "SourceMissing",
            "no such file or folder",
            "applies only to a table",
        ),
        Mistake(
            "the same in a terminal",
            "colabkit pack scores.cvs x.h5 --path-column where_is_it",
            "SourceMissing",
            "no such file or folder",
            "applies only to a table",
        ),
        Mistake(
            "a table with a column of paths of another name",
            'colabkit.pack("scores.csv", "x.h5")',
            "BadSource",
            "no column of 'scores.csv' has a common name for paths, among 'id', 'where_is_it', 'score', 'kind'",
        ),
        Mistake(
            "the same in the launcher",
            "Source: scores.csv; Pack",
            "BadSource",
            "Name the column that holds the paths with Path column.",
            "--path-column",
        ),
        Mistake(
            "paths that are relative to another folder",
            'colabkit.train_on("scores.csv", path_column="where_is_it")',
            "SourceMissing",
            "set the folder of relative paths with root=",
        ),
        Mistake(
            "the same in the launcher",
            "Source: scores.csv; Path column: where_is_it; Pack",
            "SourceMissing",
            "set the folder of relative paths with Folder of paths",
            "--root",
        ),
        Mistake(
            "labels in a column with another name",
            'colabkit.train_on("scores.csv", path_column="where_is_it", root="photos/ants")',
            "BadSource",
            "Name a column, for example labels='kind'",
        ),
        Mistake(
            "a list of labels",
            'colabkit.train_on(["photos/ants/000.png", "photos/bees/000.png"], labels=["ant", "bee"])',
            "InvalidOption",
            "labels= holds a label for each file; expected columns. Put the labels into a table",
            "there is no column",
        ),
        Mistake(
            "an array of labels",
            'colabkit.train_on("photos", labels=np.zeros(8))',
            "InvalidOption",
            "labels=<ndarray [8]>",
            "array([",
        ),
        Mistake(
            "an array in a magic that takes files",
            "%stage {pixels}",
            "InvalidOption",
            "the source is an ndarray; expected a path, an address or a table of paths",
        ),
    ),
    "Arrays": (
        Mistake(
            "arrays for train_on",
            "colabkit.train_on((np.zeros((8, 6, 5, 3)), np.zeros(8)))",
            "BadSource",
            "To pack arrays, pass colabkit.pack() a tuple of NumPy arrays",
        ),
        Mistake(
            "an array for train_on",
            "colabkit.train_on(np.zeros((8, 6, 5, 3)))",
            "InvalidOption",
            "To pack arrays, use colabkit.pack().",
        ),
        Mistake(
            "a table of numbers for train_on",
            'import pandas\ncolabkit.train_on(pandas.DataFrame(np.zeros((3, 2)), columns=["a", "b"]))',
            "BadSource",
            "If the table holds the samples themselves, pass colabkit.pack() their NumPy arrays.",
        ),
        Mistake(
            "labels of arrays in an option",
            'colabkit.pack(np.zeros((8, 6, 5, 3), "u1"), "x.h5", labels=np.arange(8))',
            "InvalidOption",
            "labels=<ndarray [8]> does not apply to arrays. Pass the labels with the samples, as a tuple",
            "truth value",
        ),
        Mistake(
            "an array as the target",
            'colabkit.pack("photos", np.zeros((8, 6, 5, 3)))',
            "InvalidOption",
            "Cannot pack to <ndarray [8, 6, 5, 3]>",
            "0.",
        ),
        Mistake(
            "text labels",
            'colabkit.Loader((np.zeros((2, 3)), np.array(["ant", "bee"])), 2)',
            "InvalidOption",
            "numpy.unique(array, return_inverse=True)",
            "astype",
        ),
    ),
    "Permissions, full disks and places": (
        Mistake(
            "a folder that you may not read",
            'colabkit.stage("secret")',
            "FileFailed",
            "permission denied for the folder 'secret'",
            "mount",
        ),
        Mistake("the same while packing", 'colabkit.pack("secret", "x.h5")', "FileFailed", "ls -ld secret", "data.mdb"),
        Mistake("the same in a terminal", "colabkit pack secret x.h5", "FileFailed", "ls -ld secret", "data.mdb"),
        Mistake(
            "a target folder that you may not write",
            'colabkit.pack("photos", "sealed/x.h5")',
            "FileFailed",
            "permission denied for the folder",
            ".partial",
        ),
        Mistake(
            "checkpoints in a folder that you may not write",
            'colabkit.train(step, loader, to="sealed/run")',
            "FileFailed",
            "permission denied for the folder",
        ),
        Mistake(
            "checkpoints in a file",
            'colabkit.train(step, loader, to="notes.txt")',
            "FileFailed",
            "is a file, not a folder",
            "file system",
        ),
        Mistake(
            "a full disk",
            'colabkit.pack("photos", "x.h5")',
            "NotEnoughSpace",
            "Free some space",
            scene="full disk",
            cause="OSError",
        ),
        Mistake(
            "the same in a magic", "%stage photos --to copy", "NotEnoughSpace", "Free some space", scene="full disk"
        ),
        Mistake(
            "a copy inside its source", 'colabkit.stage("photos", to="photos/copy")', "BadSource", "inside the source"
        ),
        Mistake(
            "a copy where other data is", 'colabkit.stage("photos", to="notes")', "TargetExists", "holds other data"
        ),
        Mistake("a folder as the pack", 'colabkit.pack("photos", "notes")', "TargetExists", "'notes' is a folder"),
        Mistake(
            "another pack at the path", 'colabkit.pack("photos", "birds.h5", size=4)', "TargetExists", "overwrite=True"
        ),
        Mistake(
            "the same in a terminal",
            "colabkit pack photos birds.h5 --size 4",
            "TargetExists",
            "--overwrite",
            "overwrite=True",
        ),
        Mistake("a copy that was never made", 'colabkit.unstage("photos")', "NotSealed", "it is not a local copy"),
    ),
    "Sources": (
        Mistake("an empty folder", 'colabkit.stage("empty")', "BadSource", "it contains no files"),
        Mistake("the same while packing", "colabkit pack empty x.h5", "BadSource", "the source has no files"),
        Mistake("a folder without images", 'colabkit.pack("notes", "x.h5")', "BadSource", "(1 .txt)"),
        Mistake("photos of a phone", 'colabkit.pack("heic", "x.h5")', "BadImage", "run pip install pillow-heif"),
        Mistake("the same in the launcher", "Source: heic; Pack", "BadImage", "run pip install pillow-heif"),
        Mistake("images without class folders", 'colabkit.pack("flat", "x.h5")', "BadSource", "labels=None"),
        Mistake("the same in a magic", "%pack flat x.h5", "BadSource", "--labels none", "function of the path"),
        Mistake("the same in the launcher", "Source: flat; Pack", "BadSource", "Labels: none", "--labels"),
        Mistake("a single image", 'colabkit.pack("photos/ants/000.png", "x.h5")', "BadSource", "not in a class folder"),
        Mistake(
            "a damaged image", 'colabkit.pack("spoiled", "x.h5", size=4)', "BadImage", "it starts with b'not an i'"
        ),
        Mistake(
            "the same in a terminal", "colabkit pack spoiled x.h5 --size 4", "BadImage", "--on-bad skip", "on_bad="
        ),
        Mistake(
            "an image with too many pixels",
            'colabkit.pack("bomb", "x.h5", size=4)',
            "BadImage",
            "3,000,000,000 pixels, more than the limit of 89,478,485",
        ),
        Mistake(
            "images of several sizes in raw encoding",
            'colabkit.pack("mixed", "x.h5", encoding="raw")',
            "BadImage",
            "size=",
        ),
        Mistake("Keras' directory", 'colabkit.pack("gone.csv", "x.h5", directory="x")', "InvalidOption", "Use root="),
        Mistake("a damaged archive", 'colabkit.stage("cut.zip")', "BadArchive", "it is damaged or truncated"),
        Mistake(
            "a table with a missing file", 'colabkit.pack("gone.csv", "x.h5")', "SourceMissing", "1 of 9 rows", "2 of"
        ),
        Mistake(
            "a table whose columns have other names",
            'colabkit.pack("names.csv", "x.h5")',
            "BadSource",
            "common name for paths, among 'name', 'kind'",
            "the first file",
        ),
        Mistake(
            "a column that does not exist",
            'colabkit.pack("birds.csv", "x.h5", labels="labl")',
            "InvalidOption",
            "no column 'labl'",
        ),
        Mistake(
            "the same in a terminal",
            "colabkit pack birds.csv x.h5 --labels labl",
            "InvalidOption",
            "no column 'labl'",
            "function of the path",
        ),
        Mistake(
            "a column of a folder", "colabkit pack photos x.h5 --splits fold", "InvalidOption", "only files", "function"
        ),
        Mistake(
            "shares that are not 1",
            'colabkit.pack("photos", "x.h5", splits={"train": 0.8})',
            "InvalidOption",
            "0.8; expected",
        ),
        Mistake(
            "the same in a terminal",
            "colabkit pack photos x.h5 --splits train=0.8",
            "InvalidOption",
            "add up to 0.8",
            "{",
        ),
        Mistake(
            "an unknown split in shares", "%pack photos x.h5 --splits trian=0.8,test=0.2", "InvalidOption", "'trian'"
        ),
        Mistake(
            "arrays of different lengths",
            'colabkit.pack({"X": np.zeros((4, 8, 8)), "Y": np.zeros(3)}, "x.h5")',
            "InvalidOption",
            "'Y' of the split 'train' has 3 samples but 'X' has 4",
        ),
        Mistake(
            "arrays without samples", 'colabkit.pack(np.zeros((0, 8, 8), "u1"), "x.h5")', "BadSource", "has no samples"
        ),
        Mistake(
            "a package that is missing",
            'colabkit.stage("s3://bucket/birds")',
            "MissingPackage",
            "pip install s3fs",
            scene="s3fs",
        ),
    ),
    "Options": (
        Mistake(
            "an option in the form of Python", "%pack birds.csv x.h5 labels=age", "InvalidOption", "mean --labels age?"
        ),
        Mistake("the same in a terminal", "colabkit pack birds.csv x.h5 labels=age", "usage", "mean --labels age?"),
        Mistake("an argument as an option", "%pack photos --to x.h5", "InvalidOption", "its value without --to"),
        Mistake("a path without its option", "colabkit stage photos local", "usage", "mean --to local?"),
        Mistake(
            "a typing error in an option",
            'colabkit.pack("photos", "x.h5", overwite=True)',
            "InvalidOption",
            "Use overwrite=",
            "unexpected keyword",
        ),
        Mistake(
            "the same in a magic",
            "%pack photos x.h5 --overwite",
            "InvalidOption",
            "did you mean --overwrite?",
            "--quality",
        ),
        Mistake("the same in a terminal", "colabkit pack photos x.h5 --overwite", "usage", "did you mean --overwrite?"),
        Mistake("an unknown verb", "colabkit stagee photos", "usage", "stage"),
        Mistake("a typing error in a general option", "colabkit --verson", "usage", "Use --version", "after the verb"),
        Mistake("another tool's option", "colabkit stage photos --log x", "usage", "unknown option --log", "did you"),
        Mistake(
            "another name of overwrite", 'colabkit.pack("photos", "x.h5", force=True)', "InvalidOption", "overwrite="
        ),
        Mistake("another name of to", 'colabkit.pack("photos", out="x.h5")', "InvalidOption", "Use to=", "layout"),
        Mistake("another name of threads", 'colabkit.stage("photos", workers=4)', "InvalidOption", "Use threads="),
        Mistake(
            "a loader where names are expected", "colabkit.dashboard(loader)", "InvalidOption", "attach=", "Loader of"
        ),
        Mistake("an unknown verb in a notebook", "%colabkit stagee photos", "InvalidOption", "Run %colabkit stage"),
        Mistake("no arguments", "%pack", "InvalidOption", "See %pack --help"),
        Mistake("a quote that is not closed", "%stage 'photos", "InvalidOption", "a quote is not closed"),
        Mistake(
            "an unknown choice",
            'colabkit.pack("photos", "x.h5", encoding="jpg")',
            "InvalidOption",
            "Use encoding='jpeg'",
        ),
        Mistake(
            "text for a number", "%pack photos x.h5 --quality high", "InvalidOption", "'high' is not a whole number"
        ),
        Mistake("text for a flag", 'colabkit.pack("photos", "x.h5", overwrite="no")', "InvalidOption", "True or False"),
        Mistake(
            "a number out of range", 'colabkit.pack("photos", "x.h5", quality=101)', "InvalidOption", "from 1 to 100"
        ),
        Mistake(
            "the same in a terminal",
            "colabkit pack photos x.h5 --quality 101",
            "InvalidOption",
            "--quality 100 or less",
        ),
        Mistake(
            "a size of three numbers",
            'colabkit.pack("photos", "x.h5", size=(2, 3, 4))',
            "InvalidOption",
            "height and width",
        ),
        Mistake("a size of 0", 'colabkit.pack("photos", "x.h5", size=0)', "InvalidOption", "size=224", "size=1."),
        Mistake("a size with a unit", "Source: photos; Image size: 32px; Pack", "InvalidOption", "32px"),
        Mistake("four channels", 'colabkit.pack("photos", "x.h5", channels=4)', "InvalidOption", "channels=3 for RGB"),
        Mistake(
            "a word for threads",
            'colabkit.stage("photos", threads="many")',
            "InvalidOption",
            "'auto' or a whole number",
        ),
        Mistake("a negative seed", 'colabkit.pack("photos", "x.h5", seed=-1)', "InvalidOption", "of 0 or more"),
        Mistake(
            "a negative limit of bad files", "colabkit pack photos x.h5 --max-bad=-1", "InvalidOption", "--max-bad 0.01"
        ),
        Mistake(
            "a size without a unit", 'colabkit.pack("photos", "x.h5", shard_bytes="big")', "InvalidOption", "256MiB"
        ),
        Mistake("a time of 0", 'colabkit.probe("photos", seconds=0)', "InvalidOption", "above 0"),
        Mistake("a target that is missing", 'colabkit.pack("photos")', "InvalidOption", "to is missing", "positional"),
        Mistake(
            "source and target exchanged",
            'colabkit.pack("x.h5", "photos")',
            "SourceMissing",
            "use colabkit.pack('photos', 'x.h5')",
        ),
    ),
    "Packs": (
        Mistake(
            "a pack that does not exist", 'colabkit.open_pack("bird.h5")', "SourceMissing", "the file does not exist"
        ),
        Mistake("a pack that was deleted", _DELETED, "SourceMissing", "the file does not exist"),
        Mistake("a folder instead of a pack", 'colabkit.open_pack("photos")', "SourceMissing", "it is a folder"),
        Mistake(
            "a text file instead of a pack", 'colabkit.open_pack("notes.txt")', "BadSource", "it is not an HDF5 file"
        ),
        Mistake("a truncated pack", 'colabkit.open_pack("cut.h5")', "Corrupt", "bytes instead of"),
        Mistake("a damaged pack", "colabkit verify spoiled.h5", "Corrupt", "do not match the seal"),
        Mistake("a folder to verify", "colabkit verify photos", "NotSealed", "a folder without checksums", "a pack;"),
        Mistake("the same in Python", 'colabkit.verify("photos")', "NotSealed", "colabkit.stage()"),
        Mistake(
            "a split that does not exist", 'colabkit.open_pack("birds.h5")["tran"]', "MissingSplit", "Use split='train'"
        ),
        Mistake("the same in a cell", "%%train birds.h5 --split tran\nloss = 0", "MissingSplit", "--split train"),
        Mistake("the same for files", 'colabkit.FileDataset("photos", split="tets")', "MissingSplit", "'tets'"),
        Mistake(
            "a sample that does not exist", "data[99999]", "MissingSample", "index 99999 is out of range for 12 samples"
        ),
        Mistake("text as an index", 'data["first"]', "InvalidOption", "the index is a str"),
        Mistake("datasets named in a pack", 'colabkit.open_pack("birds.h5", x="images")', "InvalidOption", "Omit x="),
        Mistake(
            "a file with uncommon names", 'colabkit.open_pack("theirs.h5")', "BadSource", "x='pixels'", "'images' and"
        ),
        Mistake(
            "a file of others in a terminal", "colabkit pack theirs.h5 x.h5", "BadSource", "In Python, use open_pack("
        ),
        Mistake(
            "too few labels",
            'colabkit.open_pack("theirs.h5", x="pixels", y="answers")',
            "BadSource",
            "5 samples and 4 labels",
        ),
    ),
    "Views": (
        Mistake(
            "shares that are not in a tuple",
            "data.split(0.8, 0.2)",
            "InvalidOption",
            "Use shares=(0.8, 0.2).",
        ),
        Mistake(
            "shares that add up to more than 1",
            "data.split((0.8, 0.3))",
            "InvalidOption",
            "Cannot split the samples: the shares add up to 1.1",
            "{'0'",
        ),
        Mistake(
            "a pack for train_on",
            'colabkit.train_on("birds.h5")',
            "BadSource",
            "In Python, use open_pack(path)['train'], with x= and y= unless it is a pack, and its split().",
        ),
        Mistake(
            "a pack for train_on that does not exist",
            'colabkit.train_on("brids.h5")',
            "SourceMissing",
            "no such file or folder",
            "swapped",
        ),
    ),
    "Loader": (
        Mistake(
            "a path instead of a dataset", 'colabkit.Loader("birds.h5", 4)', "InvalidOption", "open_pack(path)['train']"
        ),
        Mistake("no batch size", "colabkit.Loader(data)", "InvalidOption", "batch_size is missing", "positional"),
        Mistake(
            "a pack instead of a split",
            'colabkit.Loader(colabkit.open_pack("birds.h5"), 4)',
            "InvalidOption",
            "pack['train']",
        ),
        Mistake(
            "a DataLoader instead of a dataset",
            "colabkit.Loader(torch.utils.data.DataLoader([1, 2]), 4)",
            "InvalidOption",
            "the dataset is a DataLoader",
        ),
        Mistake(
            "arrays without a tuple", "colabkit.Loader(np.zeros((4, 3)), np.zeros(4))", "InvalidOption", "as a tuple"
        ),
        Mistake("a batch size of 0", "colabkit.Loader(data, 0)", "InvalidOption", "of 1 or more"),
        Mistake("text as the batch size", 'colabkit.Loader(data, "32")', "InvalidOption", "Use batch_size=32"),
        Mistake(
            "a batch that no epoch fills",
            "colabkit.Loader(data, 100, drop_last=True)",
            "InvalidOption",
            "batch_size=12 or less",
        ),
        Mistake(
            "three arguments without a name",
            "colabkit.Loader(data, 4, True)",
            "InvalidOption",
            "use shuffle=True",
            "positional",
        ),
        Mistake("torch's pin_memory", "colabkit.Loader(data, 4, pin_memory=True)", "InvalidOption", "always pinned"),
        Mistake(
            "torch's prefetch_factor",
            "colabkit.Loader(data, 4, prefetch_factor=2)",
            "InvalidOption",
            "Use prefetch_batches=",
        ),
        Mistake(
            "torch's generator", "colabkit.Loader(data, 4, generator=torch.Generator())", "InvalidOption", "Use seed="
        ),
        Mistake(
            "torch's worker_init_fn", "colabkit.Loader(data, 4, worker_init_fn=print)", "InvalidOption", "is seeded"
        ),
        Mistake(
            "torch's batch_sampler", "colabkit.Loader(data, 4, batch_sampler=[[0, 1]])", "InvalidOption", "Use sampler="
        ),
        Mistake(
            "torch's timeout", "colabkit.Loader(data, 4, timeout=60)", "InvalidOption", "a worker that dies raises"
        ),
        Mistake(
            "torchvision's transforms", "colabkit.Loader(data, 4, transforms=print)", "InvalidOption", "Use transform="
        ),
        Mistake(
            "a transform of the files",
            'colabkit.FileDataset("photos", transform=print)',
            "InvalidOption",
            "to the Loader",
        ),
        Mistake(
            "a class as the transform",
            "colabkit.Loader(data, 4, transform=colabkit.augment.Normalize)",
            "InvalidOption",
            "Create an instance",
        ),
        Mistake(
            "a list of transforms",
            "colabkit.Loader(data, 4, transform=[colabkit.augment.Normalize()])",
            "InvalidOption",
            "Compose([...])",
        ),
        Mistake("an unknown device", 'colabkit.Loader(data, 4, device="gpu")', "InvalidOption", "device='cuda'"),
        Mistake(
            "shuffling twice",
            "colabkit.Loader(data, 4, sampler=[0, 1], shuffle=True)",
            "InvalidOption",
            "Omit shuffle=",
        ),
        Mistake(
            "an index beyond the dataset",
            "list(colabkit.Loader(data, 4, sampler=[0, 99]))",
            "InvalidOption",
            "from 0 to 11",
        ),
        Mistake("an unknown field", 'colabkit.Loader(data, 4, fields=["Z"])', "InvalidOption", "from 'X', 'Y'"),
        Mistake(
            "arrays of different lengths",
            "colabkit.Loader((np.zeros((4, 3)), np.zeros(5)), 4)",
            "InvalidOption",
            "array 0 has 4 rows, array 1 has 5 rows",
        ),
        Mistake(
            "images of different sizes",
            'list(colabkit.Loader(colabkit.FileDataset("mixed"), 2))',
            "BadImage",
            "Pass size=",
        ),
        Mistake(
            "samples of different shapes",
            _GROWING,
            "LoaderFailed",
            "sample 0 has the shape (1,)",
            "stack expects",
            cause="RuntimeError",
        ),
        Mistake(
            "the state of another dataset",
            "loader.load_state_dict(colabkit.Loader(data.subset([1, 2]), 1).state_dict())",
            "InvalidOption",
            "another dataset",
        ),
        Mistake(
            "a crop larger than the images",
            "list(colabkit.Loader(data, 4, transform=colabkit.augment.RandomCrop(40)))",
            "InvalidOption",
            "6x5 pixels",
        ),
        Mistake(
            "a probability above 1", "colabkit.augment.RandomHorizontalFlip(p=1.5)", "InvalidOption", "from 0 to 1"
        ),
    ),
    "Training": (
        Mistake(
            "a network with too many outputs for regression",
            "regression = colabkit.supervised_step(model, optimizer, loss=nn.MSELoss())\n"
            'colabkit.train(regression, colabkit.Loader((np.zeros((8, 3, 6, 5), "f4"), np.zeros(8, "f4")), 3))',
            "InvalidOption",
            "Use a model with 1 output",
        ),
        Mistake(
            "class labels in a column",
            'colabkit.train(step, colabkit.Loader((np.zeros((8, 3, 6, 5), "f4"), np.zeros((8, 1), "i8")), 4))',
            "InvalidOption",
            "expected class indices of the shape [4] for cross entropy",
        ),
        Mistake(
            "whole numbers as features",
            "linear = nn.Linear(3, 2)\n"
            "linear_step = colabkit.supervised_step(linear, torch.optim.SGD(linear.parameters()))\n"
            'colabkit.train(linear_step, colabkit.Loader((np.zeros((8, 3), "i8"), np.zeros(8, "i8")), 4))',
            "InvalidOption",
            "the samples are int64 [4, 3], and the model's weights are float32",
        ),
        Mistake(
            "a network for images of another size",
            "digits = nn.Sequential(nn.Flatten(), nn.Linear(784, 3))\n"
            "digits_step = colabkit.supervised_step(digits, torch.optim.SGD(digits.parameters()))\n"
            "colabkit.train(digits_step, loader)",
            "InvalidOption",
            "the model's layer '1' got 90 features from inputs of the shape [4, 3, 6, 5]; expected 784. Use a layer",
        ),
        Mistake(
            "a linear network for images",
            "flat = nn.Linear(90, 3)\n"
            "flat_step = colabkit.supervised_step(flat, torch.optim.SGD(flat.parameters()))\n"
            "colabkit.train(flat_step, loader)",
            "InvalidOption",
            "expected 90. Flatten the images first, with nn.Flatten().",
        ),
        Mistake(
            "the name of a loss",
            'colabkit.supervised_step(model, optimizer, loss="mse")',
            "InvalidOption",
            "For example, use loss=nn.MSELoss().",
        ),
        Mistake(
            "a regression target for train_on",
            'colabkit.train_on("scores.csv", path_column="where_is_it", root="photos/ants", labels="score")',
            "InvalidOption",
            "or train with colabkit.prepare(), supervised_step(loss=torch.nn.MSELoss()) and colabkit.train().",
        ),
        Mistake(
            "the same in a terminal",
            "colabkit train_on scores.csv --path-column where_is_it --root photos/ants --labels score",
            "InvalidOption",
            "Check --labels, or train with colabkit prepare and colabkit train.",
        ),
        Mistake(
            "a class below 0",
            'colabkit.train(step, colabkit.Loader((np.zeros((8, 3, 6, 5), "f4"), np.arange(8) % 3 - 1), 4))',
            "InvalidOption",
            "the label -1 is in the batch",
        ),
        Mistake(
            "an option of train_on for train",
            'colabkit.train(step, loader, screen="none")',
            "InvalidOption",
            "Open the panel with colabkit.dashboard(screen=...) before training",
        ),
        Mistake("no loader", "colabkit.train(step)", "InvalidOption", "loader is missing", "positional"),
        Mistake(
            "torch's DataLoader as the loader",
            "colabkit.train(step, torch.utils.data.DataLoader(data))",
            "InvalidOption",
            "colabkit.Loader(dataloader.dataset, ",
        ),
        Mistake(
            "a pack to predict",
            'colabkit.predict(model, colabkit.open_pack("birds.h5"))',
            "InvalidOption",
            "colabkit.Loader(pack['train'], ",
        ),
        Mistake(
            "a dataset to evaluate", "colabkit.evaluate(model, data)", "InvalidOption", "colabkit.Loader(dataset, "
        ),
        Mistake("a dataset to validate", "colabkit.train(step, loader, validate=data)", "InvalidOption", "a Loader, "),
        Mistake(
            "images with the channels last",
            'colabkit.train(step, colabkit.Loader((np.zeros((8, 6, 5, 3), "f4"), np.zeros(8, int)), 4))',
            "InvalidOption",
            "numpy.moveaxis(images, 3, 1)",
            "groups=1",
        ),
        Mistake(
            "images without channels",
            'colabkit.evaluate(step, colabkit.Loader((np.zeros((8, 6, 5), "f4"), np.zeros(8, int)), 4))',
            "InvalidOption",
            "numpy.expand_dims(images, 1)",
            "groups=1",
        ),
        Mistake(
            "names of classes as their number", "colabkit.small_network(data.classes, (6, 5, 3))", "InvalidOption", "=3"
        ),
        Mistake("the channels first", "colabkit.small_network(3, (3, 64, 64))", "InvalidOption", "shape=(64, 64, 3)"),
        Mistake("one side as a shape", "colabkit.small_network(3, 64)", "InvalidOption", "height, width and channels"),
        Mistake(
            "a model to cross-validate", "colabkit.k_fold(model, data)", "InvalidOption", "(train, held_out, fold)"
        ),
        Mistake("a fold without numbers", "colabkit.k_fold(own, data)", "InvalidOption", "expected 3 arguments"),
        Mistake("a folder to diagnose", 'colabkit.doctor("photos")', "BadSource", "'photos/status.json'", "disk"),
        Mistake(
            "an unknown rhythm of checkpoints",
            'colabkit.train(step, loader, to="run", save_every="10 steps")',
            "InvalidOption",
            "a number of steps, 'epoch', or a duration",
        ),
        Mistake(
            "an optimizer as the scheduler",
            "colabkit.supervised_step(model, optimizer, scheduler=optimizer)",
            "InvalidOption",
            "torch.optim.lr_scheduler",
        ),
        Mistake(
            "a folder as the checkpoint",
            'colabkit.train(step, loader, to="trained")\ncolabkit.evaluate(model, loader, checkpoint="trained")',
            "SourceMissing",
            "Pass a checkpoint in it",
        ),
        Mistake("a folder without a run", "colabkit status photos", "SourceMissing", "saves its checkpoints", "to="),
        Mistake("loader and step exchanged", "colabkit.train(loader, step)", "InvalidOption", "step is a Loader"),
        Mistake(
            "a model as the step",
            "colabkit.train(model, loader)",
            "InvalidOption",
            "colabkit.supervised_step(model, optimizer)",
        ),
        Mistake(
            "the result of a step",
            "colabkit.train(step(next(iter(loader))), loader)",
            "InvalidOption",
            "step is a dict",
        ),
        Mistake(
            "a step of images and labels",
            "colabkit.train(pair, loader)",
            "InvalidOption",
            "step takes (x, y)",
            "positional",
        ),
        Mistake(
            "the same in a terminal",
            "colabkit train steps.py:pair steps.py:loader",
            "InvalidOption",
            "step takes (x, y)",
        ),
        Mistake("a dataset as the loader", "colabkit.train(step, data)", "InvalidOption", "loader is a PackedDataset"),
        Mistake("a typing error in an option", "colabkit.train(step, loader, epoch=3)", "InvalidOption", "Use epochs="),
        Mistake(
            "an optimizer for train",
            "colabkit.train(step, loader, optimizer=optimizer)",
            "InvalidOption",
            "supervised_step",
        ),
        Mistake(
            "text as a number of epochs", 'colabkit.train(step, loader, epochs="3")', "InvalidOption", "Use epochs=3"
        ),
        Mistake(
            "images that are not scaled",
            "%%train birds.h5\nloss = nn.functional.conv2d(x, model[0].weight).mean()",
            "InvalidOption",
            "use --transform normalize",
            "to the Loader",
        ),
        Mistake(
            "a folder as the log",
            'colabkit.train(step, loader, log="photos")',
            "InvalidOption",
            "log='photos/run.jsonl'",
        ),
        Mistake("the same in a magic", "%train step loader --log photos", "InvalidOption", "--log photos/run.jsonl"),
        Mistake("a pack in place of a Loader", "%train step birds.h5", "InvalidOption", "Load it into a variable"),
        Mistake("checkpoints without a folder", "%train step loader --save-every 5", "InvalidOption", "--to"),
        Mistake(
            "a custom step with checkpoints",
            'colabkit.train(own, loader, to="other")',
            "InvalidOption",
            "state={'model'",
        ),
        Mistake(
            "the same in a terminal",
            "colabkit train steps.py:own steps.py:loader --to other",
            "InvalidOption",
            "--state model optimizer",
            "state={",
        ),
        Mistake(
            "a model as the state",
            "colabkit.train(own, loader, state=model)",
            "InvalidOption",
            "state={'model': model}",
        ),
        Mistake("resuming with another model", _ANOTHER_MODEL, "InvalidOption", "another architecture", "state_dict"),
        Mistake(
            "the training loader for validation",
            "colabkit.train(step, loader, validate=loader)",
            "InvalidOption",
            "a separate Loader",
        ),
        Mistake(
            "a validation that returns a number",
            "colabkit.train(own, loader, validate=lambda: 3)",
            "InvalidOption",
            "validate returned an int",
        ),
        Mistake(
            "a validation that takes the model",
            "colabkit.train(own, loader, validate=lambda model: {})",
            "InvalidOption",
            "no arguments",
            "positional",
        ),
        Mistake(
            "a number to monitor that does not exist",
            'colabkit.train(own, loader, monitor="acuracy")',
            "InvalidOption",
            "monitor='acuracy'",
        ),
        Mistake(
            "a deadline without a unit", "colabkit.train(own, loader, deadline=11)", "InvalidOption", "with a unit"
        ),
        Mistake(
            "the same in a magic", "%train own loader --deadline 11", "InvalidOption", "--deadline 30min", "deadline="
        ),
        Mistake(
            "a loss that is NaN",
            'colabkit.train(lambda batch: float("nan"), loader)',
            "TrainingDiverged",
            "step 1 returned loss=nan",
        ),
        Mistake(
            "a loss for each sample",
            "colabkit.train(lambda batch: torch.zeros(4), loader)",
            "InvalidOption",
            "shape (4,)",
        ),
        Mistake(
            "model and optimizer exchanged",
            "colabkit.supervised_step(optimizer, model)",
            "InvalidOption",
            "model is an SGD",
        ),
        Mistake(
            "a class as the loss",
            "colabkit.supervised_step(model, optimizer, nn.MSELoss)",
            "InvalidOption",
            "loss=MSELoss(...)",
        ),
        Mistake(
            "the optimizer of another model",
            "colabkit.train(colabkit.supervised_step(nn.Linear(3, 3), optimizer), loader)",
            "InvalidOption",
            "none of the model's parameters",
        ),
        Mistake("model and loader exchanged", "colabkit.evaluate(loader, model)", "InvalidOption", "model is a Loader"),
        Mistake("a variable that does not exist", "%train stp loader", "InvalidOption", "use step"),
        Mistake("a file without the variable", "colabkit train steps.py:stp steps.py:loader", "InvalidOption", "step"),
        Mistake("a reference without a file", "colabkit train step loader", "InvalidOption", "train.py:step"),
        Mistake(
            "an error in the user's file",
            "colabkit train broken.py:step broken.py:loader",
            "AttributeError",
            "your file failed",
        ),
        Mistake("a doctor without a report", 'colabkit.doctor("run.json")', "SourceMissing", "the file does not exist"),
        Mistake(
            "an expression for the doctor",
            "%doctor colabkit.Loader(data, 4)",
            "InvalidOption",
            "Assign it to a variable",
        ),
        Mistake("a number to watch", "colabkit.watch(3)", "InvalidOption", "the argument is an int"),
        Mistake("a panel outside of a notebook", "colabkit.launch()", "NoNotebook", "this is not a notebook"),
    ),
}
