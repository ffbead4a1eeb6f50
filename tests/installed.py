"""A package of somebody else's, as it is found once it is installed."""


def install(folder, points, package="addon-package", version="1.5"):
    """The metadata of an installed package."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(points)
