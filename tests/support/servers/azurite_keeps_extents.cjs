// Loaded before azurite. Every ten minutes it looks for unused extents, and answers nothing until it has ended.
require("azurite/dist/src/blob/utils/constants").DEFAULT_GC_INTERVAL_MS = 2 ** 31 - 1;
