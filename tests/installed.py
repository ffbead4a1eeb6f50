"""A package of somebody else's, as it is found once it is installed."""


def install(folder, points, package="addon-package", version="1.5", modules=("addon.py",)):
    """The metadata of an installed package, which has these modules."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(points)
    (info / "RECORD").write_text("".join(f"{module},,\n" for module in modules))
