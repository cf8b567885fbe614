"""One colour for each component and each lane, in every picture."""

# Okabe and Ito's colours, told apart by people who do not see red or green; what stays through the step first.
COMPONENT = {
    "param": "#0072B2",
    "buffer": "#999999",
    "master_weight": "#56B4E9",
    "optimizer_state": "#009E73",
    "grad": "#E69F00",
    "activation": "#D55E00",
    "temp": "#CC79A7",
    "comm_buffer": "#F0E442",
    "offload_buffer": "#000000",
    "workspace": "#bbbbbb",
}
LANE = {
    "compute": "#0072B2",
    "host": "#999999",
    "nvlink": "#F0E442",
    "pcie": "#E69F00",
    "network": "#D55E00",
    "h2d": "#009E73",
    "d2h": "#56B4E9",
    "nvme": "#CC79A7",
    "cpu_optimizer": "#000000",
}
