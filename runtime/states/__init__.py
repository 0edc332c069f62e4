"""States of recurrent layers: the slots that hold them, and the snapshots of them in the prefix tree."""
