CREATE OR REPLACE TABLE touched AS
SELECT p.unit
FROM placed p
    LEFT JOIN known_units k USING (unit)
    LEFT JOIN old o ON o.unit = p.unit AND o.position = p.position
WHERE k.unit IS NULL OR k.live != p.live OR o.unit IS NULL OR {all_units}
    OR o.winner != p.winner OR p.winner AND p.file IS DISTINCT FROM o.file
UNION
SELECT unit FROM old ANTI JOIN placed USING (unit, position)
