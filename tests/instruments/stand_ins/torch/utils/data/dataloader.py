from . import DataLoader as DataLoader
