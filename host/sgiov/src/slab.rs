//! Values by number. The numbers of removed values are used again.

/// Values by number.
pub struct Slab<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Stores a value and returns its number: the one that was freed last, or a new one.
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(number) = self.free.pop() {
            self.places[number as usize] = Some(value);
            return number;
        }
        self.places.push(Some(value));
        self.places.len() as u32 - 1
    }

    pub fn remove(&mut self, number: u32) -> Option<T> {
        let value = self.places.get_mut(number as usize)?.take()?;
        self.free.push(number);
        Some(value)
    }

    pub fn get(&self, number: u32) -> Option<&T> {
        self.places.get(number as usize)?.as_ref()
    }

    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.places.get_mut(number as usize)?.as_mut()
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let some = |(number, place): (usize, &'_ Option<T>)| place.as_ref().map(|_| number as u32);
        let numbers = self.places.iter().enumerate().filter_map(some);
        numbers.filter_map(|number| Some((number, self.get(number)?)))
    }

    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Returns the highest number that was ever in use, plus one.
    pub fn end(&self) -> u32 {
        self.places.len() as u32
    }
}
