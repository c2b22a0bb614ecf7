//! Folders of images.

use std::fmt;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use image::{ImageReader, Limits, RgbImage};
use phalanx::{Error, Result};

use super::{bad, entries, files, io_error};
use crate::Dataset;
use crate::dataset::item;

/// torchvision's.
const EXTENSIONS: &[&str] = &["jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"];
/// Of an image's sides, in pixels.
const MAX_SIDE: u32 = 1 << 15;
/// What decoding an image may take.
const MAX_BYTES: u64 = 512 << 20;

/// An image and its class.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageSample {
    /// With three channels, whatever the file has.
    pub image: RgbImage,
    /// Its place in [`ImageFolder::classes`].
    pub class: usize,
}

/// Images in folders, one for each class; torchvision's `ImageFolder`. Classes are the folders under `root`, in the order of their
/// names, and items the files in them, and in folders under them, in the order of theirs.
///
/// ```no_run
/// use phalanx_data::{Dataset, folder::ImageFolder};
///
/// let photos = ImageFolder::open("photos")?; // photos/cat/1.jpg, photos/dog/7.png, ...
/// let sample = photos.get(17)?;
/// println!("a {} of {:?} pixels", photos.classes()[sample.class], sample.image.dimensions());
/// # Ok::<(), phalanx::Error>(())
/// ```
pub struct ImageFolder {
    classes: Vec<String>,
    files: Vec<(PathBuf, usize)>,
}

impl ImageFolder {
    /// The folder at `root`. Files are listed, not opened.
    ///
    /// # Errors
    /// If there is no folder in it, or one without an image.
    pub fn open(root: impl AsRef<Path>) -> Result<Self> {
        let root = root.as_ref();
        let (mut classes, mut found) = (Vec::new(), Vec::new());
        for (folder, _) in entries(root)?.into_iter().filter(|(_, is_folder)| *is_folder) {
            let class = classes.len();
            found.extend(files(&folder, EXTENSIONS)?.into_iter().map(|file| (file, class)));
            classes.push(folder.file_name().unwrap_or_default().to_string_lossy().into_owned());
        }
        if classes.is_empty() {
            return Err(Error::invalid_argument(format!("{} has no folder in it", root.display()))
                .with_remedy("make a folder for each class, with its images"));
        }
        Ok(Self { classes, files: found })
    }

    /// The names of the classes.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Files with their classes, by item.
    pub fn files(&self) -> &[(PathBuf, usize)] {
        &self.files
    }
}

impl Dataset for ImageFolder {
    type Item = ImageSample;

    fn len(&self) -> usize {
        self.files.len()
    }

    fn get(&self, index: usize) -> Result<ImageSample> {
        let (path, class) = item(&self.files, index)?;
        let file = File::open(path).map_err(|error| io_error(path, &error))?;
        // By what is in it: many a .jpg is a PNG.
        let reader = ImageReader::new(BufReader::new(file)).with_guessed_format();
        let mut reader = reader.map_err(|error| io_error(path, &error))?;
        let mut limits = Limits::default();
        (limits.max_image_width, limits.max_image_height) = (Some(MAX_SIDE), Some(MAX_SIDE));
        limits.max_alloc = Some(MAX_BYTES);
        reader.limits(limits);
        let image = reader.decode().map_err(|error| {
            bad(path, "its image", error, "remove the file, or write it again; a side may have 32,768 pixels")
        })?;
        Ok(ImageSample { image: image.into_rgb8(), class: *class })
    }
}

impl fmt::Debug for ImageFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImageFolder({} images of {} classes)", self.files.len(), self.classes.len())
    }
}
