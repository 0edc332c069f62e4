from . import IterableDataset as IterableDataset
