CREATE TABLE final AS
SELECT
    p.* REPLACE (
        coalesce(p.file, a.file) AS file,
        CASE WHEN p.file IS NULL THEN p.source ELSE p.from_source END AS from_source,
        CASE WHEN p.file IS NULL THEN p.row ELSE p.from_row END AS from_row,
        coalesce(a.category, p.category) AS category,
        coalesce(a.ok, p.ok) AND coalesce(d.ok, TRUE) AS ok),
    d.file AS added_file
FROM placed p
LEFT JOIN answered a ON p.winner AND p.live AND p.file IS NULL AND a.source = p.source AND a.row = p.row
LEFT JOIN added d ON p.winner AND p.live AND p.file IS NOT NULL AND d.source = p.source AND d.row = p.row
