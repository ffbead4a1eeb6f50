"""Running a deployment: administration, certificates, Flower's processes and their supervision."""
