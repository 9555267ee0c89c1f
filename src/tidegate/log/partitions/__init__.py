"""One partition: appending, fetching, rolling, loading and recovering its log segments."""
