"""Every size that a sender could make large, and why the limit is where it is."""

# A 1M-token prompt at 16 tokens a block is 65,536 ids, 256 KiB packed; longer lists are sent in
# parts (`BlockIds`). A layout of 128 layers with 6 components is 150 KiB. No known engine needs 4 MiB.
MAX_FRAME_BYTES = 4 << 20

# One engine's manifest: 64 ranks x (40 tensors x ~150 B + NIXL metadata ~1 KiB) is 450 KiB;
# ranks of 128 layers in hybrid models are ten times that.
MAX_PEER_MESSAGE_BYTES = 16 << 20

# A peer's request. The largest is `JoinRank`: a layout as long as a `register` may be (1 MiB), NIXL
# metadata of 2 MiB, and 8,192 pieces of 10 bytes. It takes 28 ms at most to decode without its manifest.
MAX_PEER_REQUEST_BYTES = 4 << 20

# The grants that a node holds at one peer: 64 ranks x 1,024 pulls. 2 MiB, decoded in 5 ms.
MAX_GRANTS_PER_RENEWAL = 1 << 16

# Ids in one frame. Half a MiB keeps frames small enough to interleave with other messages.
IDS_PART_BYTES = 512 << 10

# A 4M-token request at page size 1, a 64M-token one at 16, all groups together. The check for ids that are
# listed twice takes 35 ms of the daemon for so many, in which it serves no other session.
MAX_REQUEST_IDS_BYTES = 16 << 20

# A group is a kind of layer. The limit is there because a name without ids takes memory too.
MAX_GROUPS_PER_REQUEST = 256

# Tickets in one `DeliveredByMover`: the default limit of pulls that a session may have at a time.
MAX_DELIVERED_BY_MOVER = 1024

# Requests of one connection whose ids arrive in parts at the same time.
MAX_OPEN_ASSEMBLIES = 8

# Regions of one rank: 128 layers x 4 components are 512. One sendmsg carries at most 253 descriptors
# (SCM_MAX_FD); more regions share a descriptor by offset.
MAX_REGIONS = 1024
MAX_FDS_PER_FRAME = 253

# Physical allocations of one rank's GPU memory, a descriptor each: 160 GiB in torch's 20 MiB segments.
# Descriptors beyond a frame's limit are sent ahead of it (`FdBatch`).
MAX_DESCRIPTORS_PER_RANK = 8192

MAX_ADDRESS = (1 << 63) - 1  # of an address that another daemon sends: sums fit in 64 bits
MAX_DEVICES = 1 << 10  # NIXL device ids; a node has 8 GPUs, or 56 slices of them

# NIXL's metadata of one mover's regions, or of one fence page: about 100 bytes for each registered address
# range, of which there are at most 8,192, and some for each NIC. It is sent to movers in frames.
MAX_METADATA_BYTES = 2 << 20

MAX_NAME_CHARS = 256  # engine ids, transfer ids, group names: they are shown in logs and tables
# An endpoint: a host name of 253 characters, a port, a key of 64 digits.
MAX_ENDPOINT_CHARS = 512
# `Hello`: a name of the client and a few fields. Fields that a later version adds are ignored, and small.
MAX_HELLO_BYTES = 4 << 10
# `register`: a layout of 128 layers with 6 components is 150 KiB, 8,192 pieces of regions 72 KiB.
MAX_REGISTER_BYTES = 1 << 20
# A reference: five names of at most 256 characters (JSON may write one in 12 bytes), and fields that a
# later version adds.
MAX_REF_BYTES = 16 << 10
# Why a mover cannot do something, in a library's words; 128 ranks keep 8 MiB.
MAX_REASON_CHARS = 64 << 10
MAX_SENTENCE_CHARS = 2000  # of a peer's error message, which is forwarded to workers
# 64 ranks of 128 layers with 6 components are 49,152; checking one takes 20 us of the daemon.
MAX_ENGINE_TENSORS = 1 << 16
MAX_RANKS = 4096  # pp_size * tp_size: larger than any engine known today by two orders

FENCE_WORD_BYTES = 16
FENCE_PAGE_BYTES = 64 << 10  # 4,096 published transfers of one session at a time
FENCE_SLOTS = FENCE_PAGE_BYTES // FENCE_WORD_BYTES

# A packet on a worker's delivery socket: one `Delivered`.
MAX_DELIVERY_BYTES = 1024

# What a mover reads a covering read into; memory for it is granted in multiples. 64 MiB are sixteen reads,
# each of a few milliseconds. A mover has one for a read, one for a scatter, one for a read posted behind it,
# and one for another pull.
CHUNK_BYTES = 4 << 20
MAX_CHUNKS_PER_MOVER = 4
